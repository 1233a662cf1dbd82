"""What agents of one run say to each other: authenticated connections, and the bytes of frames beside them."""
