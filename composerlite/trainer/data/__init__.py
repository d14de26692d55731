"""Where a run stands in its data, by kind of loader; which samples are whose over ranks; going on there on resume."""
