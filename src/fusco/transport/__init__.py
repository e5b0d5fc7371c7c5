"""Messages between nodes: records over TCP, rows over whatever network gloo or NCCL runs on."""
