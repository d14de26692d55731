"""What is written down about a checkpoint, as plain data and pure functions: its name, its manifest, which attempt of a
run it belongs to, which parts of the state it holds, which ones are kept. No function here opens a checkpoint.
"""
