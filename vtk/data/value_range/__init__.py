"""The value range of a data set: which LOW and HIGH become 0 and 255 in images of more than 8 bits.

Every such file is measured once, when the scan decodes it: type, and quantiles of each band from the smallest to the
largest value. From all files together the range is settled, one for a model of 1 or 3 channels and one for each band
otherwise. By default it goes from the smallest to the largest value, but

- a few files (1 of 10 to 99, 2 % of more) whose values go beyond twice the range of all others do not count; the audit
  names them, and their values are clipped;
- an end within 5 % of a usual one is moved there: 0 below; above 1 of floats, and all bits set of 8, 10, 12, 14, 16 or
  32 bits.

``--value-range LOW HIGH`` sets both ends; ``p1`` is the first percentile of all pixels, interpolated between the files'
quantiles. Images of 8 bits are taken as they are.
"""
