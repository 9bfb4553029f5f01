"""Packs cut to low rank: the ranks by one threshold, chosen on one half of the held-out images, judged on the other."""
