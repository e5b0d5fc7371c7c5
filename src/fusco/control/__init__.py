"""What ranks tell each other through the host, whatever the device: connecting, records, beginning and end."""
