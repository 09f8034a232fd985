"""Reports of runs: one reader of what a run recorded, and the tables and figures made from it."""

from mirrorquant.report.record import RecordError, RunRecord, file_name, read_results

__all__ = ["RecordError", "RunRecord", "file_name", "read_results"]
