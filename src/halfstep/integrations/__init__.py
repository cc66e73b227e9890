"""halfstep inside other libraries' training loops: one module per library; this package imports none of them.

    from halfstep.integrations.transformers import HalfstepTrainer

A module whose library is missing raises `halfstep.errors.MissingLibraryError`, which names the extra to install.
"""
