"""GPT-2: the network, its loss, and what is done with a trained one."""
