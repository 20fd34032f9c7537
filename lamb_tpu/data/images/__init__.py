"""Photographs: decoded, cropped and augmented on the host, as uint8 arrays."""
