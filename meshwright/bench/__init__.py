"""Speed, measured beside other tools in one run: `python -m meshwright.bench --suite foundation`."""
