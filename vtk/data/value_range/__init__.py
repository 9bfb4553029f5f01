"""The value range of a dataset: which LOW and HIGH become 0 and 255 in images of more than 8 bits.

The scan records the type of every such file, and quantiles of each band from the smallest to the largest value. The
range is chosen from all files: one for a model of 1 or 3 channels, one per band otherwise. By default it goes from the
smallest to the largest value, but

- a few files (1 of 10 to 99, 2 % of more) whose values go beyond twice the range of all others are ignored; the audit
  names them, and their values are clipped;
- an end within 5 % of a common one is moved there: 0 for LOW; for HIGH the largest value of 8, 10, 12, 14, 16 or 32
  bits, or 1 for floats.

``--value-range LOW HIGH`` sets both ends; ``p1`` is the first percentile of all pixels, interpolated between the files'
quantiles. Images of 8 bits are used unchanged.
"""
