"""Files of the field in and out: volumes, pictures, DICOM, NRRD; atomic writes."""
