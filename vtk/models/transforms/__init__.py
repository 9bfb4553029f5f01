"""Changes of an architecture that packs store and repeat when they are loaded."""
