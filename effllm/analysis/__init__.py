"""Reading of many runs: tables for SQL, files for other engines, comparison."""
