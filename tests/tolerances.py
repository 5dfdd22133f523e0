"""Every tolerance of the test-suite, with its reason. None is ever widened to make a test pass."""

# float64 at another layout: sums in another order differ by some 1e-13 relative after three
# optimizer steps; every real fault (a missing sum, a wrong mean, a lost mask) shows above 1e-6.
PARITY_FLOAT64 = 1e-9

# float64 against the same formulas written with plain autograd: only rounding differs.
PLAIN_FLOAT64 = 1e-11
