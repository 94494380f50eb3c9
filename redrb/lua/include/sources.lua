-- Groups that stages forward from other tasks, their sources: each source is stored once.
--
-- A source is a leased group of another task: its id there, and a digest of its bytes. The hash sources has
-- a field for each origin, a task and a consumer group of it: "<incarnation> <floor> <trimmed> <kept>". In
-- this incarnation of the other task all groups up to the id `floor` are deleted for good, so a put that
-- names one of them comes too late, and is refused; but for those in `kept`, which may come back, as dead
-- letters do: ids with commas between them. The hash sources:<origin> has a record of each source, by its id
-- there: "<id here> <digest>", with the id 0 if a filter dropped the group. Records up to the id `trimmed`
-- are removed, but for those of kept ids.
-- docs/contributing/decisions/stages.md says why no group is stored twice.
--@include task

-- The parts of an origin's row: incarnation, floor, trimmed, and a set of the kept ids.
local function read_row(row)
  local incarnation, floor, trimmed, listed = string.match(row, '^(%S+) (%d+) (%d+) ?(.*)$')
  local kept = {}
  for id in string.gmatch(listed or '', '%d+') do
    kept[id] = true
  end
  return incarnation, tonumber(floor), tonumber(trimmed), kept
end

-- Why a put of sources is refused, or nil: "known": one of them is stored; "past": they are not of the
-- incarnation, or not above the floor, of this origin. The fields of `said` are origin, incarnation, floor
-- and kept ids, as the other task has said, and ids and digests of the sources: first those of the entries,
-- then those of dropped groups.
local function refused_sources(said)
  local row = redis.call('HGET', key('sources'), said.origin)
  if not row then
    return nil
  end
  local known, floor, _, kept = read_row(row)
  if known ~= said.incarnation then
    return {outcome = 'past', origin = redis.sha1hex(row)}
  end
  local records = redis.call('HMGET', key('sources', said.origin), unpack(said.ids))
  for i, record in ipairs(records) do
    if record and string.match(record, '%S+$') == said.digests[i] then
      return {outcome = 'known'}
    elseif tonumber(said.ids[i]) <= floor and not kept[said.ids[i]] then
      return {outcome = 'past', origin = redis.sha1hex(row)}
    end
  end
  return nil
end

-- The kept ids of an origin, by its row and by what its task said. Below the floor of the row none comes
-- back, however old the message is. Returns a list, and those of the row that are not kept any more.
local function merge_kept(floor, kept, said_floor, said)
  local found, over = {}, {}
  for _, id in ipairs(said) do
    if kept[id] or tonumber(id) > floor then
      found[#found + 1] = id
    end
    said[id] = true
  end
  for id in pairs(kept) do
    if tonumber(id) > said_floor then
      found[#found + 1] = id
    elseif not said[id] then
      over[#over + 1] = id
    end
  end
  return found, over
end

-- Record the sources of the `count` entries beyond the id `before`, and of dropped groups, and remove a page
-- of old records. What can fail comes before the records.
local function record_sources(said, before, count)
  local row = redis.call('HGET', key('sources'), said.origin)
  local known, trimmed, kept = 0, said.floor, {}
  if row then
    local _
    _, known, trimmed, kept = read_row(row)
  end
  local keeping, old = merge_kept(known, kept, said.floor, said.kept)
  local floor, spared, records = math.max(said.floor, known), {}, {}
  for _, id in ipairs(keeping) do
    spared[id] = true
  end
  local last = math.min(floor, trimmed + PAGE.sources_trimmed)
  for seq = trimmed + 1, last do -- bound: PAGE.sources_trimmed
    local id = string.format('%d', seq)
    if not spared[id] then
      old[#old + 1] = id
    end
  end
  for i, id in ipairs(said.ids) do
    records[2 * i - 1] = id
    records[2 * i] = string.format('%d %s', i <= count and before + i or 0, said.digests[i])
  end
  in_parts('HDEL', key('sources', said.origin), old)
  redis.call('HSET', key('sources'), said.origin,
    string.format('%s %d %d %s', said.incarnation, floor, last, table.concat(keeping, ',')))
  in_parts('HSET', key('sources', said.origin), records)
end
