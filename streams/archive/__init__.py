"""Topics as Parquet files: written once, checked, read and restored byte for byte."""
