"""Host resources of sandboxes: cgroups, uids, disks, outer jail, watchdog.

Imports nothing: `outer_jail` runs with the standard library only.
"""
