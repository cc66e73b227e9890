"""Float16 weights take the update themselves; small updates are lost, and nothing else is."""

from halfstep.recipe.spec import LossScale, Recipe


fp16_nomaster = Recipe(
    name="fp16-nomaster",
    summary="fp16 weights take the update themselves, rounded to nearest; moments in fp32, dynamic loss scale.",
    source="the comparison of Micikevicius et al. 2018, arXiv 1710.03740, section 3.1: fp16-master without its master",
    weights="fp16",
    compute="fp16",
    loss_scale=LossScale(),
    notes=("beside fp16-master it shows what the master copy alone does; fp16-pure's moments are in fp16 too",),
)
