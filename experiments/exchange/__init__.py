"""When it pays to send less: exchanges of gradients on fast and slow networks."""
