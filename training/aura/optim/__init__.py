"""What makes updates of gradients: AdamW in its number formats, Muon, the learning rate."""
