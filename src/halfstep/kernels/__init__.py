"""Fast paths: functions equal bit for bit to the reference they replace, `run(...)` of a file each.

Where one does not apply it returns False or None, and so does what gives the numbers that it is compiled for.
"""
