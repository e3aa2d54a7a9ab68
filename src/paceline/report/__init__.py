"""A run's records as one HTML file that opens offline, and as figures. Torch-free."""

from paceline.report.figures import report_figures
from paceline.report.writer import write_ablation_report, write_comparison, write_report

__all__ = ["report_figures", "write_ablation_report", "write_comparison", "write_report"]
