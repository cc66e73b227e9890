"""halfstep inside other libraries' training loops: one module a library, which imports it; this package imports none.

    from halfstep.integrations.transformers import HalfstepTrainer

A module whose library is missing raises `halfstep.errors.MissingLibraryError`, which names the extra that brings it.
"""
