"""What a compiled program costs: its operations, its traffic, and the TPUs it is for."""
