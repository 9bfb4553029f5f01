"""What a model says of images: evaluated, or as labels, in any back-end."""
