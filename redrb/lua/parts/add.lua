-- Count the part of a group that the same transaction has just stored, or remove it again.
-- Runs in MULTI after HSETNX part_blobs <index and key> <part>. After the last part the caller puts the
-- group.
-- KEYS[1] stream
-- ARGV    key, index, of, least, bury, kind, age_ms, grace_ms, most, incarnation, series, right, priority,
--         tags
--         of, least, bury: as in include/parts.lua; bury is '1' or '0'; kind: '' fits all
--         age_ms: age of the group's first part at which it is delivered as it is, or removed
--         grace_ms: time after which another maker puts a whole group
--         most: groups of which some parts may wait
--         series, right: right of admission for the group, '' for none; priority, tags: '' for none
-- Returns {'waits', keeps, due}; keeps: 1 if the group keeps the right; due: 1 if parts/due has work
--       | {'whole', keeps, due, record}
--       | {'ended', 0, due, id | ''}: the key has ended before, as the group with this id or as none
--       | {'differs', of, least, bury, kind}: the earlier parts of the group have these
--       | {'full', 0, due}: as many groups wait already
--       | {'unadmitted'}: the task's order needs a right, and no part has brought one
--       | {'gone'}: the task was deleted, or created anew
--       Repeated, it counts nothing a second time.
--@include task clock facts parts

if redis.call('HEXISTS', key('part_records'), ARGV[1]) == 0 then
  --@include permissions
  check_permissions(stream)
end
begin_writing()
local name, index, of, least, kind = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[6]
local right, rule, field = ARGV[12], rules(), blob_field(ARGV[2], ARGV[1])
local now = now_ms()
local record = record_of(name)
local known = record and string.byte(record.have, index + 1) == 49

local function is_due()
  local over = string.format('%.0f', now)
  return #redis.call('ZRANGEBYSCORE', key('part_due'), '-inf', over, 'LIMIT', 0, 1)
end

local function refuse(reply)
  if not known then
    redis.call('HDEL', key('part_blobs'), field)
  end
  return reply
end

if not rule.exists or rule.incarnation ~= ARGV[10] then
  return refuse({'gone'})
elseif not record then
  local id = redis.call('HGET', key('part_ends'), name)
  if id then
    add(key('parts'), 'late', 1)
    return refuse({'ended', 0, is_due(), id})
  elseif redis.call('ZCARD', key('part_due')) >= tonumber(ARGV[9]) then
    return refuse({'full', 0, is_due()})
  end
  record = {of = of, least = least, bury = ARGV[5] == '1', kind = kind, have = string.rep('0', of), count = 0,
    bytes = 0, whole = false, begun = now, ends = now + ARGV[7]}
elseif record.of ~= of or record.least ~= least or record.bury ~= (ARGV[5] == '1')
  or kind ~= '' and record.kind ~= '' and kind ~= record.kind then
  return refuse({'differs', record.of, record.least, record.bury and 1 or 0, record.kind})
end
if rule.order == 'admission' and right == '' and not record.right then
  return refuse({'unadmitted'})
end

set_clock()
if known then
  add(key('parts'), 'repeated', 1)
else
  if record.count == 0 then
    add(key('parts'), 'begun', 1)
    redis.call('ZADD', key('part_due'), string.format('%.0f', record.ends), name)
  end
  local size = redis.call('HSTRLEN', key('part_blobs'), field)
  record.have = string.sub(record.have, 1, index) .. '1' .. string.sub(record.have, index + 2)
  record.count, record.bytes = record.count + 1, record.bytes + size
  record.priority = ARGV[13] ~= '' and ARGV[13] or record.priority
  record.tags = record.tags or ARGV[14] ~= '' and ARGV[14] or nil
  add(key('parts'), 'waiting', 1)
  add(key('parts'), 'bytes', size)
  if record.count == record.of then
    record.whole = true
    redis.call('ZADD', key('part_due'), string.format('%.0f', now + ARGV[8]), name)
  end
end
if right ~= '' and not record.right then
  --@include held_rights
  record.series, record.right = ARGV[11], right
  keep_right(record.series, right)
end
redis.call('HSET', key('part_records'), name, cmsgpack.pack(record))
local keeps = right ~= '' and record.right == right and record.series == ARGV[11] and 1 or 0
if record.whole then
  return {'whole', keeps, is_due(), cmsgpack.pack(record)}
end
return {'waits', keeps, is_due()}
