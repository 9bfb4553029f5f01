"""Images and their labels, read from folders, tables of labels and the datasets of timm."""
