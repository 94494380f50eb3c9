-- Drop groups without enough parts at the age limit, or return one that the caller is to put or to bury.
-- KEYS[1] stream
-- ARGV    grace_ms
--         grace_ms: time after which another caller gets the same group
-- Returns {dropped}: so many groups were dropped
--       | {dropped, key, record, over}: a whole group, or one that is as old as it may become; over: 1 in the
--         second case, 0 in the first one
--@include task clock facts waking parts permissions


check_permissions(KEYS[1])
begin_writing()
if not rules().exists then
  return {0}
end
local now, dropped, rights = set_clock(), 0, false
local reply = {}
local over = redis.call('ZRANGEBYSCORE', key('part_due'), '-inf', string.format('%.0f', now), 'LIMIT', 0,
  PAGE.parts_dropped)
for _, name in ipairs(over) do
  local record = record_of(name)
  if record.whole or record.bury or record.count >= record.least then
    redis.call('ZADD', key('part_due'), string.format('%.0f', now + ARGV[1]), name)
    reply = {name, cmsgpack.pack(record), now >= record.ends and 1 or 0}
    break
  end
  end_parts(name, record, 'dropped', '')
  dropped = dropped + 1
  if record.right then
    --@include held_rights
    return_right(record.series, record.right)
    rights = true
  end
end
if rights then
  wake_makers(now)
end
return {dropped, unpack(reply)}
