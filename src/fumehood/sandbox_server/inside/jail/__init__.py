"""Builds the jail: root file system, namespaces, Landlock, seccomp."""
