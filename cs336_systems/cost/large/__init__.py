"""What a large run costs on machines that few have: operator by operator, from data sheets and fitted constants."""
