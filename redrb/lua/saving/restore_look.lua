-- Say whether a task was restored from a file before, and what it holds. Writes nothing.
-- KEYS[1] stream
-- ARGV    file, ever put, whole
--         file: checksum of the file; ever put: number that the file has; whole: as restore_end describes it
-- Returns {how, ever put, stored now}
--         how: 'unchanged': restored from this file, and nothing was put or taken since
--         | 'restored': restored from this file | 'other'
--@include stage task

local how = 'other'
if redis.call('HGET', task, 'restored_file') == ARGV[1] then
  local unchanged = ever_put() == tonumber(ARGV[2]) and is_whole(cmsgpack.unpack(ARGV[3]))
  how = unchanged and 'unchanged' or 'restored'
end
return {how, ever_put(), stored_now()}
