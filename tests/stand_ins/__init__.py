"""Stand-ins for devices and libraries that are not on every machine."""
