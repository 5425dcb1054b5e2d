"""Reading and writing volumes, pictures, DICOM and NRRD; atomic writes."""
