"""Device memory that peers can see: its layout, how ranks share it, and what kernels report to the host."""
