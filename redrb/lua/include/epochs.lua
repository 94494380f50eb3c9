-- The epochs of the records of producers, and whether a record may have been removed.
--
-- The hash puts holds a record of each producer's last put, by which a repetition of this put is
-- recognized. Nobody knows whether a producer has died, so a record goes by its age, counted in epochs: the
-- field `epoch` of the hash counts them up, at most once in EPOCH_MS (include/producers.lua). A record holds
-- the epoch of its put, and is removed two epochs later. Every put names the epoch in which it was first
-- sent, and one of a producer without a record is stored only if that is the epoch of now or the one before.
-- So a repetition of a put whose record was removed is refused, however late it comes.
-- docs/contributing/decisions/growth.md has the proof.

-- Whether a put of a producer without a record may be a repetition of one whose record was removed.
local function may_be_forgotten(sent, epoch)
  local age = tonumber(epoch or '0') - sent
  return age ~= 0 and age ~= 1
end
