"""Sinks of a run's numbers and images besides its folder: a small file for each, imported only when it is chosen."""

from npu_vlrl.report.sinks.sinks import CaptionedImage, Opening, Sink, Sinks, check_installed

__all__ = ["CaptionedImage", "Opening", "Sink", "Sinks", "check_installed"]
