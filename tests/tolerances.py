"""Every tolerance of the test-suite, with its reason. None is ever widened to make a test pass."""

# float64 at another layout: sums in another order differ by some 1e-13 relative after three
# optimizer steps; every real fault (a missing sum, a wrong mean, a lost mask) shows above 1e-6.
PARITY_FLOAT64 = 1e-9

# float64 against the same formulas written with plain autograd: only rounding differs.
PLAIN_FLOAT64 = 1e-11

# float32 results against the float64 formula on the same inputs, relative to the largest magnitude:
# sums of up to some thousand terms keep six digits. A result that passed through bfloat16 misses by
# 4e-3.
FLOAT32 = 2e-6

# bfloat16 results that are computed in float32 and rounded once lie within half a unit in the last
# place of the exact value; the float32 computation may move it by this share of the largest value.
ROUNDED_ONCE_NOISE = 1e-6

# Loss of a bfloat16 model beside the float32 one of the same weights: rounding of logits near 1
# moves a token's loss by some 4e-3, the mean over tokens by less.
BFLOAT16_LOSS = 5e-3
