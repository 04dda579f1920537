"""Rank processes on this machine: how they are started, what is sent to them, how their results and errors come back.

No process group and no policy here: `trainer_kit.testing` keeps ranks alive from job to job, `trainer_kit.launch` starts them for one
function. Importing this package starts nothing.
"""
