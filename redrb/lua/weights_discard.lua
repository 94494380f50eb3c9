-- Delete the chunks of an attempt that failed, unless its version was committed after all.
-- KEYS[1] versions
-- ARGV    token, version, chunks
-- Returns the number of chunks deleted.
--@ _weights

if committed(ARGV[1], ARGV[2]) then
  return 0
end
return on_chunks('UNLINK', ARGV[1], ARGV[2], tonumber(ARGV[3]))
