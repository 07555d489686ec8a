"""The way out of a sandbox with an allow-list: a proxy in the supervisor; imports only siblings of `sandboxd`."""
