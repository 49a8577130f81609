"""Sinks of a run's numbers and images besides its folder: a small file for each, imported only when it is chosen."""

from npu_vlrl.report.sinks.sinks import Opening, Picture, Sink, Sinks, check_installed

__all__ = ["Opening", "Picture", "Sink", "Sinks", "check_installed"]
