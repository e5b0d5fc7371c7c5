"""Messages between nodes, over whatever network torch.distributed runs on."""
