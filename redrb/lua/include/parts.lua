-- Groups that makers put in parts, until all parts of a group are there.
--
-- The hash part_records holds a record by the group's key, packed with cmsgpack: `of`, `least` and `bury`, in
-- which all parts agree; `kind`, fields and dtypes of the first part; `have`, a text with '1' at the place of
-- each part that is there; `count` and `bytes` of these; `whole`, whether all are there; `ends`, time of the
-- age limit; `priority` of the last part that gave one, `tags` of the first one, as texts; `right` of
-- admission, and its `series`.
-- part_blobs holds the encoded parts; part_due sorts the keys by the time when they are to be looked at: the
-- age limit, or for a whole group the time by which its maker has most likely died before it put the group.
-- part_ends holds the id of the group that a key became, '' if none; part_ended sorts these by time.
-- The hash parts has counters: groups that were `begun`, and `completed`, `delivered` without all parts,
-- `dropped` or `dead`; parts `waiting` and their `bytes`; `repeated` and `late` parts.
--@include task clock

local KEEP_ENDS_MS = 7200000

local function record_of(name)
  local packed = redis.call('HGET', key('part_records'), name)
  return packed and cmsgpack.unpack(packed)
end

local function blob_field(index, name)
  return string.format('%d %s', index, name)
end

-- The fields of part_blobs that hold the parts of a group, in order.
local function blob_fields(name, record)
  local found = {}
  for index = 0, #record.have - 1 do -- bound: parts of one group, 4,096 at most (MOST_PARTS)
    if string.byte(record.have, index + 1) == 49 then
      found[#found + 1] = blob_field(index, name)
    end
  end
  return found
end

-- Remember what became of a key, and forget some keys that ended long ago.
local function note_end(name, id, now)
  redis.call('HSET', key('part_ends'), name, id)
  redis.call('ZADD', key('part_ended'), string.format('%.0f', now), name)
  local before = string.format('%.0f', now - KEEP_ENDS_MS)
  local over = redis.call('ZRANGEBYSCORE', key('part_ended'), '-inf', before, 'LIMIT', 0,
    PAGE.part_ends_forgotten)
  if #over == 0 and redis.call('ZCARD', key('part_ended')) > PAGE.part_ends then
    over = redis.call('ZRANGE', key('part_ended'), 0, PAGE.part_ends_forgotten - 1)
  end
  if #over > 0 then
    redis.call('ZREM', key('part_ended'), unpack(over))
    redis.call('HDEL', key('part_ends'), unpack(over))
  end
end

-- Remove the parts of a group, which has become the group `id`, or none: ''. `outcome` is a counter.
local function end_parts(name, record, outcome, id)
  in_parts('HDEL', key('part_blobs'), blob_fields(name, record))
  redis.call('HDEL', key('part_records'), name)
  redis.call('ZREM', key('part_due'), name)
  add(key('parts'), outcome, 1)
  add(key('parts'), 'waiting', -record.count)
  add(key('parts'), 'bytes', -record.bytes)
  note_end(name, id, now_ms())
end

-- A claim has fields key, count and outcome: so many parts are to become a group, or to be removed. Returns
-- their record, or nil if they have become a group before, or there are others now.
local function claimed_record(claim)
  local record = record_of(claim.key)
  return record and record.count == claim.count and record or nil
end

-- Remove the parts of a claim that was not refused. Returns their record.
local function end_claimed(claim, id)
  local record = record_of(claim.key)
  end_parts(claim.key, record, claim.outcome, id == '' and '' or string.format('%d', id))
  return record
end
