"""Every tolerance of the test-suite, with its reason. None is ever widened to make a test pass."""

import torch

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

# Triton kernels against float64, relative in the Frobenius norm. float32: a few units in the last
# place. 16 bits: results are rounded once (bfloat16 2.2e-3 at most, 1.7e-3 usually; float16 an
# eighth of it), attention also rounds its probabilities, and backward their gradients.
KERNEL_FORWARD = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
KERNEL_BACKWARD = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 6e-4}

# Sums of thousands of terms in float32 on a GPU against float64, relative in the Frobenius norm.
# Tensor cores cut the last bits of a partial sum some T / 16 times, which leaves about 1e-5 at 8192
# terms. A product that was rounded to bfloat16 misses by 1.7e-3, one of TF32 inputs by 3e-4.
SUMS_IN_FLOAT32 = 1e-4

# Half a unit in the last place of bfloat16 and of float16, relative: one rounding to nearest.
BFLOAT16_UNIT = 2.0**-8
FLOAT16_UNIT = 2.0**-11

# float64 models of which one computes norms, softmax and rotation angles in float32, whatever its
# dtype (transformers does): some 1e-7 from each, a few radians of angle at the tests' positions.
STOCK_FLOAT32 = 5e-6

# The model's gradients of a first step at another layout, relative to the largest of a tensor. In
# 16 bits a tp rank's partial products are rounded before they are summed: over five layers, four
# units were met, eight are allowed. Later steps cannot be compared so: AdamW makes +-lr of the
# smallest gradient's sign.
LAYOUT_GRADIENTS = {
    "float32": FLOAT32,
    "bfloat16": 8 * BFLOAT16_UNIT,
    "float16": 8 * FLOAT16_UNIT,
}
# Losses of three steps at another layout, relative: the mean over tokens of what rounding moves.
LAYOUT_LOSSES = {"float32": FLOAT32, "bfloat16": BFLOAT16_LOSS, "float16": 2e-3}

# Logits of a model beside those of its stock class in transformers, float32, of magnitude near 1:
# sums in other orders over a few layers; a wrong epsilon or base shows above 1e-3.
EXCHANGE_FLOAT32 = 1e-5
