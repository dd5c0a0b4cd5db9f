"""Stand-ins for the compiled dataset helpers of the Megatrons."""
