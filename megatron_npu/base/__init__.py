"""What everything else may use: errors, settings, files, the parser of flags."""
