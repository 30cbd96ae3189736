"""What each process of a job needs that is split over several: memory by part in every layout, the time of a step with
what processes send each other, and a layout that fits."""
