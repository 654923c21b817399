"""Matmuls and attention by another algebra than the sum of products: one level of Strassen (in Winograd's form, seven
block products instead of eight) and Winograd's inner-product trick.

    strassen.py          a matmul by a constant; strassen_nest.py is its loop nest
    strassen_packed.py   no constant on the right: its panels are copied on the way
    strassen_transposed.py   1x1 convolutions with channels first
    paired.py            matmuls and convolutions by a constant in pairs along K; row_gemm.py is what they compute
    attention.py         the knob `paired` of attention; attention_nest.py is its loop nest

They are special cases of algebra and not of schedule, and yet no rewrite of one matmul into several. A rewrite's
matmuls are kernels that meet in memory, or loop nests one after the other. Here the parts meet in registers:

- Strassen: the first register tile of a product computes its difference of weights between FMAs that wait for nothing
  else, and leaves it in L1 for the other tiles. Five of the seven products begin with the sums that another has left,
  as their accumulators, and results go straight into the epilogue. Seven matmuls and their sums, one after the other,
  would read and write each result several times over, and that costs more than the one product in eight that is saved:
  the whole gain is 2% to 12% at most sizes.
- Winograd's inner-product trick: of the rows of one register tile two thirds are computed in pairs and one third
  product by product, in turn, so that adders and multipliers are busy in the same cycle. A graph cannot say that of
  parts of one result. Which tiles may run so is decided tile by tile, on the data (`runtime/paired.py`).

So they are templates, kept apart. **This folder is closed**: no variants for more shapes, layouts or types are added
to it. A new one has to come as a schedule of the contraction template, or as a rewrite, or not at all.

The other templates do not know these: nothing is imported from here but `TEMPLATES`, once, by `templates/cpu`. What
they use of others has no leading underscore. A template here that has the name of another (attention) takes its place.
Their numerics (`relaxed`, or `fast` with a certificate) are those of `docs/numerics.md`.
"""

from tilewright.space.template import Template
from tilewright.space.templates.cpu.fast_algebra.attention import PairedAttention
from tilewright.space.templates.cpu.fast_algebra.paired import Paired
from tilewright.space.templates.cpu.fast_algebra.strassen import Strassen
from tilewright.space.templates.cpu.fast_algebra.strassen_packed import StrassenPacked
from tilewright.space.templates.cpu.fast_algebra.strassen_transposed import StrassenTransposed

TEMPLATES: tuple[Template, ...] = (
    PairedAttention(),
    Paired(),
    Strassen(),
    StrassenPacked(),
    StrassenTransposed(),
)
