"""Every file decoded once in worker processes, and the results of earlier scans."""
