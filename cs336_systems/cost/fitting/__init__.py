"""The constants of the model of time, from measurements: logs of Megatron-LM, this project's records, lists of runs."""
