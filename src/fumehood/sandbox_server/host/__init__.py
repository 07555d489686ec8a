"""Host resources of sandboxes: cgroups, users, disks, outer jail, watchdog."""
