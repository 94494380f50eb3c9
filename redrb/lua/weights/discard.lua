-- Delete the keys of an attempt that failed, unless its version was committed after all.
-- KEYS[1] versions
-- ARGV    token, version, elsewhere, full, pieces
--         elsewhere: '1': the keys are on other nodes; the caller deletes them there afterwards
--         full, pieces: the keys of the attempt, without chunks shared with an earlier version
-- Returns {'ok', keys deleted} | {'committed'}
--@include weights permissions

local committed = at(tonumber(ARGV[2]))
local function has_its_keys(ranges)
  return string.find(';' .. (ranges or ''), ';' .. ARGV[1] .. ' ', 1, true)
end
if committed and (committed.token == ARGV[1] or has_its_keys(committed.full)
    or has_its_keys(committed.pieces)) then
  return {'committed'}
end
if ARGV[3] == '1' then
  check_permissions(pins)
  begin_writing()
  redis.call('SADD', dropped, ARGV[1]) -- a commit meanwhile learns it
  redis.call('EXPIRE', dropped, 3600)
  return {'ok', 0}
end
return {'ok', on_keys('UNLINK', add_keys(add_keys({}, 'chunk', ARGV[4]), 'delta', ARGV[5]))}
