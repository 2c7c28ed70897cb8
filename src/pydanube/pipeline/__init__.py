"""Jobs over topics, on Spark: lake, audit, replay, stats. `danube pipeline run JOB --conf FILE`.

steps.py    DataFrame → DataFrame, each with the columns it promises; no files, no clock
tables.py   where tables are kept, and how a batch becomes part of one exactly once
lake.py …   one job each: its settings, and a thin driver that puts steps together
run.py      settings, session, progress, report, exit code
"""
