"""The tables and verdicts of ``safetensors_folders.py``."""

from __future__ import annotations

from tables import print_table, read, text, verdict

__all__ = ["show"]


def show() -> None:
    """Print them."""
    results = read("safetensors_folders")
    systems = results["systems"]
    columns = {"writing": ("durable_s", "of_disk_write"), "reading": ("warm_s", "of_page_cache_read")}
    rows = [
        [
            f"{name} {system['version']}",
            *(
                text(system["parts"][part][value], 2) if part in system["parts"] else ""
                for part, values in columns.items()
                for value in values
            ),
        ]
        for name, system in systems.items()
    ]
    header = ["median (min–max)", "durable after, s", "of disk_write", "read warm, s", "of page_cache_read"]
    print_table(f"A folder of safetensors, {results['folder_bytes'] / 1e9:.2f} GB", header, rows)
    print()
    ours = systems["composerlite"]["parts"]
    print(verdict("Writing", ours["writing"]["of_disk_write"], "of disk_write", at_least=0.9))
    print(verdict("Reading", ours["reading"]["of_page_cache_read"], "of page_cache_read", at_least=0.6))
